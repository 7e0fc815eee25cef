-- A dump restored elsewhere brings watches along: their relation has another number now, or the same by chance, and their
-- transactions are counted by another cluster, so what they noted would be unseen by every snapshot there, and moved for ever.
create function fabric.cluster() returns text
language sql stable
as $$ select system_identifier::text from pg_control_system() $$;

alter table fabric.watched add column cluster text not null default fabric.cluster();
comment on column fabric.watched.cluster is 'whose transaction numbers its changes have';

-- Watches of another cluster or of a relation that is gone, with their triggers wherever a restore has put them.
create function fabric.forget_watches_from_elsewhere() returns void
language plpgsql
as $body$
declare
    w fabric.watched;
    t pg_trigger;
begin
    for w in
        select * from fabric.watched
        where cluster <> fabric.cluster() or not exists (select from pg_class where oid = relation)
    loop
        for t in
            select * from pg_trigger
            where not tgisinternal
              and tgname in (
                  format('fabric_watch_%s_insert', w.watch_id), format('fabric_watch_%s_update', w.watch_id),
                  format('fabric_watch_%s_delete', w.watch_id), format('fabric_watch_%s_truncate', w.watch_id))
        loop
            execute format('drop trigger %I on %s', t.tgname, t.tgrelid::regclass);
        end loop;
        execute format('drop function if exists fabric.%I()', format('note_change_%s', w.watch_id));
        delete from fabric.watched where watch_id = w.watch_id;
    end loop;
end
$body$;
